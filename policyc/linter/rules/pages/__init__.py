"""Codes that no check of this package reports, each with its page.

They are reported while a policy is read, by the suppression comments, by the checks in `program`, or when a loss is
compiled. To add a code, add a row to one of these modules and report it where the fault is detected.
"""

from policyc.linter.rules.pages import after_reading, names, program, text

RULES = (*text.RULES, *names.RULES, *after_reading.RULES, *program.RULES)
