"""Read launch scripts without running them."""
