"""Worker processes for reading data: the pool, the servers that fork its workers, and messages between them."""
