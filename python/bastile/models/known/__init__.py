"""The forms of code that operators serve. No model type has a name here: whoever has the code has the form.

An entry is a formula, how its attributes are called in the order in which the code reads them, and what the operator
has to be told. Its fingerprints are of the texts that it has had in Transformers since 5.0; `python tools/forms.py`
lists those of a release beside them. A new text of a formula is one more fingerprint, after `bastile support --check`
of a type that has it."""

from bastile.models.known import experts, layers, linears, mlps, norms, rotary
from bastile.models.known._form import Form as Form

FORMS: tuple[Form, ...] = (
    *norms.FORMS,
    *mlps.FORMS,
    *rotary.FORMS,
    *layers.FORMS,
    *experts.FORMS,
    *linears.FORMS,
)

KNOWN: dict[str, Form] = {fingerprint: form for form in FORMS for fingerprint in form.fingerprints}
