"""python -m radixserve.native: build the kernels ahead of time, for this machine or for every level of its architecture."""

import argparse
import sys
from collections.abc import Sequence

from radixserve.errors import ConfigError
from radixserve.native import build, levels
from radixserve.native.compiler import KernelBuildError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m radixserve.native", description=__doc__)
    parser.add_argument("--all-levels", action="store_true", help="for every processor of this architecture, not only this one")
    parser.add_argument("--into-package", action="store_true", help="beside the package's code instead of into the user's cache")
    options = parser.parse_args(arguments)
    directory = build.PREBUILT_DIR if options.into_package else build.cache_dir()
    try:
        for level in levels.known_levels() if options.all_levels else (levels.level_of_this_machine(),):
            print(build.build(level, directory))
    except (ConfigError, KernelBuildError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; what was not finished is not there", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
