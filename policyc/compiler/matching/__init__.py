"""Which rule decides a site. Loads without JAX, as do sites, plans and plan JSON, which editors import too."""
