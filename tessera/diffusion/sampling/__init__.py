"""Sample images and videos with generation models: solvers, guidance, pipelines, and the files they write."""
