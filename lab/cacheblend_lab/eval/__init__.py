"""Questions of the evaluation: of pages of the Python manual."""
