"""From rows to batches on the device: processes that work ahead, and the share of each rank."""
