"""Plain modules that two or more families use. No module here has a buffer or knows where it runs."""
