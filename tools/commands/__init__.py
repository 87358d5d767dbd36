"""The commands, one module each: `main(argv) -> exit status`. They call workers over HTTP only."""
