"""Tables and figures of the four papers that Onestem follows, each as one run of this engine."""
