"""What a pool stands on: messages between processes, and how worker processes begin and end."""
