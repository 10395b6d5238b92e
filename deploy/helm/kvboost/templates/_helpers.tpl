{{- define "kvboost.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "kvboost.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" }}
{{- else }}
{{- $name := default .Chart.Name .Values.nameOverride }}
{{- (contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name)) | trunc 52 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "kvboost.selector" -}}
app.kubernetes.io/name: {{ include "kvboost.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvboost.labels" -}}
{{ include "kvboost.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "kvboost.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "kvboost.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "kvboost.secretName" -}}
{{- default (include "kvboost.fullname" .) .Values.secrets.existingSecret }}
{{- end }}

{{/* A number as a person writes it: YAML numbers arrive as floats, and 1e+06 is no integer to the server. */}}
{{- define "kvboost.plain" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) }}{{ printf "%d" (int64 .) }}{{ else }}{{ toString . }}{{ end }}
{{- end }}
