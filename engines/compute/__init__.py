"""How a batch is computed: the model runner and its compute paths, and the model put together and tested."""
