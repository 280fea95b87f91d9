"""Which rule decides a site. Loads without JAX: editors and the playground import nothing else of the compiler."""
