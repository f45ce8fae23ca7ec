"""Offer the verbs on the command line, each a few lines over the functions of `import tessera`."""
