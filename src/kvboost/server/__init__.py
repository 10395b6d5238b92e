"""The HTTP server: what clients and administrators speak to. The only package that knows fastapi."""
