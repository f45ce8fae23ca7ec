"""Commands that `tessera_compat` adds to the command line."""
