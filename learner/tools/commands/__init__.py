"""The commands of gleaner: what each takes on the command line, and its --help. What they do is in learner.tools; they
import it as they are called, so that --help, a typo and the shell's completion are answered at once."""
