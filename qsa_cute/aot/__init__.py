"""From the registry to cubins and manifests. Build time only: nothing here is imported to load or launch.

`plan` decides what to build, `compile` is one variant's own process, `cubin` and `sass` read what came out,
`manifest` judges and records it, `store` publishes a folder at a time, `build` ties them together and `verify`
checks the result. `cli` is the command line. Only `compile` imports the DSL, and only in its own process.
"""
