"""How a batch is computed: the model runner, its compute paths, and the assembly and test of a model."""
