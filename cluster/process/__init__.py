"""The process tree of `tandem serve`: forks, signals, files and the processes that outlive it."""
