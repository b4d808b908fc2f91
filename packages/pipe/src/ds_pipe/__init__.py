"""Training steps as programs: printable actions, passes, a verifier and a small runner."""
