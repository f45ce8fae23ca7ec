"""The verbs from the shell. Each is a few lines over the same functions that `import tessera` offers."""
