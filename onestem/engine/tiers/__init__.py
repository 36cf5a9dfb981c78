"""Keys and values below KV memory: in host memory and on a disk."""
