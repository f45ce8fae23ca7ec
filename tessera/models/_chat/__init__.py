"""What processors of families that read conversations share."""
