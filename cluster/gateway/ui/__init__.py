"""The pages for a browser: files that `make ui` builds of ui/source into ui/static, and how they are answered."""
