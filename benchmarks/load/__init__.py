"""What one engine serves under load with each KV connector, over HTTP, side by side."""
