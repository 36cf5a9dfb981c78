"""Whether an answer changes in any bit with what should not matter: `onestem check-bits`."""
