"""Speed, measured on random weights and KV at the shapes of real models: `settings` says what, `runner` how."""
