"""The checklist of `lockstep replay --checklist`: runs common manual checks on the first recorded step."""
