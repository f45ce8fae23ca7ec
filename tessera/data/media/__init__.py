"""Images, videos and audio from untrusted files: sizes from their headers, and decoded content."""
