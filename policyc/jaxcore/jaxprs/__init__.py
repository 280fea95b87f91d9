"""Reading, following and rewriting jaxprs."""
