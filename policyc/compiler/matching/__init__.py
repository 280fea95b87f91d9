"""Which rule decides a site. Loads without JAX, as do sites, plans and their JSON: editors and the playground use them."""
