"""Commands of the gateway, one module each: `main(argv) -> exit status`. They reach workers over HTTP only."""
