"""Documents for the command line: files cut into passages, kept in Chroma and in the engine's store side by side."""
