"""Data sets whose records are read by index, from several file formats and several formats of conversations."""
