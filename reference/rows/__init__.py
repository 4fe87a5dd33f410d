"""NumPy references: ops on rows and elements: softmax, dropout, embedding, global_norm, AdamW."""
