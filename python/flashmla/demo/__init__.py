"""`flashmla demo`: a trained DeepSeek-architecture model over a paged cache."""
