"""One model over several devices: tensor parallelism by transformers' own plans, a process for each device."""
