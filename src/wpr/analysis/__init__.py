"""Looking into what a regularizer does: case studies of single responses, semantic contrast."""
