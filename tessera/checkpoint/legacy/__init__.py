"""Read pickle files of other tools without executing anything, and write them for users of these tools."""
