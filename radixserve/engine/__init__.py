"""The only place where scheduler and runner meet."""
