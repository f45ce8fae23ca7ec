"""Modules that several families use. They have no buffers and know nothing of devices and ranks."""
