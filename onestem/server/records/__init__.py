"""What is kept of calls that have ended, and what is counted."""
