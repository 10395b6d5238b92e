"""What `kvboost demo` plays and shows: real documents, a story of requests over them, and a token map."""
