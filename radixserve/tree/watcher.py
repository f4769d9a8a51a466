"""TreeWatcher: told, as it happens, which positions of the tree became or stopped being cached. For who keeps pointers into the tree.

Cheaper than a TreeEvent, which names a path by its hash: a watcher gets the nodes themselves, and only reads them.
"""

from time import perf_counter
from typing import Protocol

from radixserve.tree.node import TreeNode


class TreeWatcher(Protocol):
    """Each is called when the tree is whole again. Ghosts count as gone."""

    def grew(self, node: TreeNode, num_bytes: int) -> None:
        """The last num_bytes of the node's edge are cached now: all of it, or what was put at its end."""

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """`lower` gave the beginning of its edge to `upper`, its parent now."""

    def cut(self, leaf: TreeNode, num_bytes: int) -> None:
        """Of the leaf's edge only the first num_bytes are cached still. 0: it is a ghost, and keeps tokens and parent."""

    def cleared(self, root: TreeNode) -> None:
        """Nothing is cached; the root is another one."""


class _NoWatcher:
    def grew(self, node: TreeNode, num_bytes: int) -> None:
        pass

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        pass

    def cut(self, leaf: TreeNode, num_bytes: int) -> None:
        pass

    def cleared(self, root: TreeNode) -> None:
        pass


NO_WATCHER = _NoWatcher()


class HasSeconds(Protocol):
    seconds: float


class TimedApart:
    """Hands on to a watcher, and takes its time off an account: what the queue does when the tree changes is not the tree's work."""

    def __init__(self, watcher: TreeWatcher, account: HasSeconds) -> None:
        self._watcher = watcher
        self._account = account

    def grew(self, node: TreeNode, num_bytes: int) -> None:
        start = perf_counter()
        self._watcher.grew(node, num_bytes)
        self._account.seconds -= perf_counter() - start

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        start = perf_counter()
        self._watcher.split(upper, lower)
        self._account.seconds -= perf_counter() - start

    def cut(self, leaf: TreeNode, num_bytes: int) -> None:
        start = perf_counter()
        self._watcher.cut(leaf, num_bytes)
        self._account.seconds -= perf_counter() - start

    def cleared(self, root: TreeNode) -> None:
        start = perf_counter()
        self._watcher.cleared(root)
        self._account.seconds -= perf_counter() - start
