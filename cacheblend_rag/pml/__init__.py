"""The prompt markup language (Prompt Cache, section 3.2): schemas of reusable modules, and prompts that import them."""
