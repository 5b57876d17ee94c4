import multiprocessing
import sys

collect_ignore_glob = [] if sys.platform == "linux" else ["*"]  # several processes need Linux

# Its children begin where this one is: with the library loaded and nothing used.
multiprocessing.set_forkserver_preload(["tests.process.chaos", "tests.process.children", "tests.process.restarts"])
