"""The demonstration: fictional documents, a real Chroma, a real embedding model, two frameworks, four ways to answer."""
