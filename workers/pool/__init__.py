"""A worker's KV pool: paged memory that another process may read, and the caches that live in it."""
