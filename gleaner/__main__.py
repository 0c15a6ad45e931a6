"""`python -m gleaner`, and the console script: the command line, whatever lies in the working directory."""

from learner.tools.start import console

if __name__ == "__main__":
    console()
