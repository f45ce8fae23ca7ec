"""Download models and data sets from Hugging Face or ModelScope into the caches of their libraries, and verify them."""
