{{/* The parts of the pod that depend on what is enabled. */}}

{{- define "kvboost.env" -}}
- name: KVBOOST_SETTINGS_FILE
  value: /etc/kvboost/settings
- name: KVBOOST_HASH_SECRET
  valueFrom:
    secretKeyRef:
      name: {{ include "kvboost.secretName" . }}
      key: hash-secret
{{- if ne .Values.cache.sizeGiB nil }}
- name: KVBOOST_CACHE_BYTES
  value: {{ printf "%d" (mulf 1073741824.0 .Values.cache.sizeGiB | int64) | quote }}
{{- else }}
- name: KVBOOST_KV_CACHE_SIZE_RATIO
  value: {{ .Values.cache.ratio | quote }}
{{- end }}
{{- if .Values.cache.encrypt }}
- name: KVBOOST_ENCRYPT
  value: "1"
{{- end }}
{{- if .Values.disk.enabled }}
- name: KVBOOST_DISK_DIRECTORY
  value: /var/lib/kvboost/chunks
- name: KVBOOST_DISK_BYTES # less than the volume: an emptyDir over its limit evicts the pod
  value: {{ printf "%d" (mulf 966367641.6 .Values.disk.sizeGiB | int64) | quote }}
{{- end }}
{{- if .Values.redis.enabled }}
- name: KVBOOST_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ include "kvboost.secretName" . }}
      key: redis-url
- name: KVBOOST_REDIS_TTL_S
  value: {{ include "kvboost.plain" .Values.redis.ttlS | quote }}
- name: KVBOOST_REDIS_TIMEOUT_S
  value: {{ include "kvboost.plain" .Values.redis.timeoutS | quote }}
{{- if .Values.redis.caSecret }}
- name: KVBOOST_REDIS_CA_FILE
  value: /etc/kvboost/redis-ca/ca.crt
{{- end }}
{{- end }}
- name: HOME # the root file system is read-only
  value: /var/cache/kvboost
- name: XDG_CACHE_HOME
  value: /var/cache/kvboost
- name: HF_HOME
  value: /var/cache/kvboost/huggingface
{{- if .Values.model.offline }}
- name: HF_HUB_OFFLINE
  value: "1"
{{- end }}
{{- if or .Values.secrets.hfToken .Values.secrets.existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ include "kvboost.secretName" . }}
      key: hf-token
      optional: true
{{- end }}
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "kvboost.resources" -}}
{{- $requests := deepCopy (.Values.resources.requests | default dict) }}
{{- $limits := deepCopy (.Values.resources.limits | default dict) }}
{{- $_ := set $requests "memory" (include "kvboost.memoryRequest" .) }}
{{- if ne .Values.memory.limitGiB nil }}
{{- $_ := set $limits "memory" (include "kvboost.gibibytes" .Values.memory.limitGiB) }}
{{- end }}
{{- if .Values.gpu.enabled }}
{{- $_ := set $limits .Values.gpu.resource 1 }}
{{- end }}
requests:
  {{- toYaml $requests | nindent 2 }}
limits:
  {{- toYaml $limits | nindent 2 }}
{{- end }}

{{- define "kvboost.mounts" -}}
- name: tmp
  mountPath: /tmp
- name: model-cache
  mountPath: /var/cache/kvboost
- name: settings # the directory, without subPath: a subPath would never see a change
  mountPath: /etc/kvboost/settings
  readOnly: true
- name: secrets
  mountPath: /etc/kvboost/secrets
  readOnly: true
{{- if .Values.model.existingClaim }}
- name: models
  mountPath: /models
  readOnly: true
{{- end }}
{{- if .Values.disk.enabled }}
- name: chunks
  mountPath: /var/lib/kvboost
{{- end }}
{{- if and .Values.redis.enabled .Values.redis.caSecret }}
- name: redis-ca
  mountPath: /etc/kvboost/redis-ca
  readOnly: true
{{- end }}
{{- end }}

{{- define "kvboost.volumes" -}}
- name: tmp
  emptyDir:
    sizeLimit: 1Gi
- name: model-cache
  {{- if .Values.model.cache.existingClaim }}
  persistentVolumeClaim:
    claimName: {{ .Values.model.cache.existingClaim }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ include "kvboost.gibibytes" .Values.model.cache.sizeGiB }}
  {{- end }}
- name: settings
  configMap:
    name: {{ include "kvboost.fullname" . }}-settings
- name: secrets
  secret:
    secretName: {{ include "kvboost.secretName" . }}
    defaultMode: 0440
    items:
      - key: admin-token
        path: admin-token
      {{- if .Values.auth.enabled }}
      - key: api-keys
        path: api-keys
      {{- end }}
{{- if .Values.model.existingClaim }}
- name: models
  persistentVolumeClaim:
    claimName: {{ .Values.model.existingClaim }}
    readOnly: true
{{- end }}
{{- if .Values.disk.enabled }}
- name: chunks
  {{- if eq .Values.disk.type "persistentVolumeClaim" }}
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-chunks" (include "kvboost.fullname" .)) .Values.disk.existingClaim }}
  {{- else if eq .Values.disk.type "ephemeral" }}
  ephemeral:
    volumeClaimTemplate:
      spec:
        {{- include "kvboost.claimSpec" . | nindent 8 }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ include "kvboost.gibibytes" .Values.disk.sizeGiB }}
  {{- end }}
{{- end }}
{{- if and .Values.redis.enabled .Values.redis.caSecret }}
- name: redis-ca
  secret:
    secretName: {{ .Values.redis.caSecret }}
    defaultMode: 0440
    items:
      - key: ca.crt
        path: ca.crt
{{- end }}
{{- end }}

{{- define "kvboost.claimSpec" -}}
accessModes: [ReadWriteOnce] # a local file system: the index needs shared memory
{{- with .Values.disk.storageClassName }}
storageClassName: {{ . }}
{{- end }}
resources:
  requests:
    storage: {{ include "kvboost.gibibytes" .Values.disk.sizeGiB }}
{{- end }}

{{- define "kvboost.gibibytes" -}}
{{- printf "%dMi" (mulf 1024.0 . | ceil | int64) }}
{{- end }}
