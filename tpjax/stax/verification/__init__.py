# SPDX-FileCopyrightText: 2026 The tpjax authors
# SPDX-License-Identifier: Apache-2.0
"""`verify=True`: what the passes made is held to the original program (`verify.check`)."""
