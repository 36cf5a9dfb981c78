"""What keys own: files, batches, prefixes, schemas."""
